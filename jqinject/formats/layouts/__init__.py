"""How each library lays the numbers of a low-bit matrix out in its files. One module each."""
