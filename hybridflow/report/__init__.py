"""`hybridflow report`: a run, or two beside each other, as one HTML page that needs nothing but itself."""
