"""What chips can do at best, and how long that lets a piece of work take. No JAX."""
