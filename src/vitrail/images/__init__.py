"""Images: decoding, preprocessing, cropping, normalizing. Nothing here knows a model."""
