"""Which schedule runs for a size, how tuned, and the measurements that say so."""
