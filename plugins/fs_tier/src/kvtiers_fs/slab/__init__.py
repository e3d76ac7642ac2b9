"""The slab layout: values in large segment files, found by one index that all processes of a machine share."""
