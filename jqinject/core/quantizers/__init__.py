"""The quantizers that components are assembled into."""
