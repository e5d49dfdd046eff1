"""Keys and values of a batch's rows in pages of one pool: written there, and attended to there."""
