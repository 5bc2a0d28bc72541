"""Random models and random step programs, run sharded and by plain torch; see tests/dist/training/test_fuzz.py."""
