"""Checkpoints without pickle: tensors in safetensors files, the rest in JSON, durable folders around."""
