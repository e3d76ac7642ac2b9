"""The tier host: the helper process that calls a store, and all that it imports."""
