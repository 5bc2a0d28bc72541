"""What is plugged into Lightning: precision, loss scaling, callbacks, the launcher."""
