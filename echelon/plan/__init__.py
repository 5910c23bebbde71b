"""What a layout will hold, send and take, said before it runs."""
