"""One table: stage × precision × accumulation × ranks × layout, against a naive single-process reference."""
