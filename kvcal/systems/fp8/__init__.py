"""fp8, next to which plans are measured."""
