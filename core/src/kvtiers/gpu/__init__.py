"""The worker's side: KV blocks to rows and back."""
