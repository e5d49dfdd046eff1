"""Model families, without parallelism, and their checkpoint mapping."""
