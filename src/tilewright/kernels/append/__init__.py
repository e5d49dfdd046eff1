"""New keys and values go into a cache, each row's at its own place, and no others."""
