"""One global batch: cut into microbatches, laid out as tree rows or padded batches, and weighted as one batch."""
