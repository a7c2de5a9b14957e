"""The dialect of ms-swift 4.x."""
