"""What `make site` needs beside mkdocs: pages made while it builds, the gallery's pictures, a look at every page."""
