"""Graph passes, FX in and FX out: ``tag`` says what backward recomputes, ``lower`` places the communication."""
