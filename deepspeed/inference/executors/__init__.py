"""From a batch to logits. The scheduler and the KV cache know no tensor."""
