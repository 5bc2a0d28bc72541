"""What ranks tell each other without a collective, and what they must do alike."""
