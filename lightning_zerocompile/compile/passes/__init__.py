"""Graph passes, each from FX graph to FX graph."""
