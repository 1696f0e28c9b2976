"""What the cache server keeps: chunk objects in one pool segment, which are pinned, and what is evicted for room."""
