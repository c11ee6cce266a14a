"""What a run says about itself, while it runs and afterwards."""
