"""What one weight version consists of, and where its bytes lie: tensor specs, placements, manifest, stream and buckets."""
