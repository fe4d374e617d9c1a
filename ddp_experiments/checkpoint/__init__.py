"""Checkpoints without pickle: tensors in safetensors files, everything else in JSON, durable folders around them."""
