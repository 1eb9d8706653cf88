"""Weight versions and the places of their bytes: tensor specs, placements, the manifest, the stream and its buckets."""
