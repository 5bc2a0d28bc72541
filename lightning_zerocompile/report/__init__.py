"""What a run says of itself: a line at its start, a report with advice, warnings."""
