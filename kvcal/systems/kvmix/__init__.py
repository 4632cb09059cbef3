"""KVmix: bits and windows by importance."""
