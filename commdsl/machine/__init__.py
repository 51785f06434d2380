"""What there is to run on: topologies, cycles through their links, element types, this process's settings."""
