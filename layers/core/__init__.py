"""The machinery that every operation shares: `Op`, shardings, and checks of arguments."""
