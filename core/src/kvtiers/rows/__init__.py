"""What a row of the primary region is: its layout, its memory, its value's name and seal."""
