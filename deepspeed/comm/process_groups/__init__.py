"""Process groups, rendezvous, mesh and axes: which ranks exist. Communicates only to form groups."""
