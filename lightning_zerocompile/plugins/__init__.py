"""What Lightning plugs in: precision, loss scaling, callbacks, the launcher."""
