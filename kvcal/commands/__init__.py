"""Commands beyond the pipeline's own, one file each; ``kvcal.cli`` names them."""
