"""What tests are made of: ranks, models, references."""
