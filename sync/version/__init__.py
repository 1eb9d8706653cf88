"""Weight versions and the layout of their bytes: tensor specs, placements, the manifest, the stream and its buckets."""
