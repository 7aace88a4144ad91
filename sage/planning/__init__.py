"""Draft trees, and the interface of the policies that shape them."""
