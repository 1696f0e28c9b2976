"""What the cache server keeps: chunk objects in one pool segment, who holds them, and what goes when room is needed."""
