"""The places at which a mask holds."""
