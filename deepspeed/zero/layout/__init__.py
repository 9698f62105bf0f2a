"""Assignment of the elements of parameters to ranks: shard layouts, placements, regions and stages."""
