"""The one torch.compile call: what is compiled, with which backend and passes."""
