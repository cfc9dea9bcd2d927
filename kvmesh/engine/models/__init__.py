"""Model families: one file each, assembled from `blocks`; `registry` names them."""
