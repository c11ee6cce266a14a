"""What autograd saves for backward, on its way to another tier and back."""
