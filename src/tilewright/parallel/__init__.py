"""Many devices: the mesh, processes, and exchanges between shards that hide behind computation. Knows no model and no graph."""
