"""The pool: CPU memory that outlives its engine, and the keeper process that holds it."""
