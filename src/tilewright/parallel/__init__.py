"""Several devices: mesh, processes, and collectives that overlap with compute. Independent of models and graphs."""
