"""What a run will need before it runs: memory, communication and time by stage, and which stage to choose."""
