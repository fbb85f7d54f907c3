"""What several tests share: networks, data, slow reference answers, tables of cases. There are no tests in here.

=====================  ==============================================================================================
``models``             small networks by name (`MODELS["tied weights"]`), and likelihoods with targets
``slow_answers``       their Jacobians and Gauss-Newton matrices by a loop
``drawing``            random tensors that are the same on every device
``two_layers``         networks of two layers with a forward function of the test's own
``recipes``            the likelihood and the baseline of `CONTRIBUTING.md`, which belong to no library
``trained``            networks that have learned their data
``layouts``            rows held as pieces, beside the dense matrix that they stand for
``cube``               an operation without a forward-mode derivative and without `vmap`
``processes``          other Python processes
``source_files``       the modules of the library, and tests that look at each of them (`each_module`)
``data_folders``       small data sets in the formats of the real ones
``posterior_fits``     fits of both projected posteriors (`fit_mlp`)
``posterior_files``    saved posteriors with something changed
``checkpoint_fits``    fits that store their progress and are interrupted (`fit_in_sweeps`)
``memory_shortage``    fits with too little memory (`fit_with_projector`)
``method_table``       all posteriors, baselines and detectors: add a baseline or a detector here
``evaluated``          data and methods for the tests of `nb.evaluate`
``calibrations``       small posteriors and held-out data for the tests of `calibrate`
``detector_problem``   a network with ReLU features, and what it computes in numpy, for the tests of detectors
``projector_table``    all projectors: add a projector here
``layer_table``        all layers with a rule: add a layer here
``compatibility_…``    the table of models behind `docs/compatibility.md`, its entries (``case``), and its ``page``
``zoo``                the networks of that table
``paper``              networks and dense answers for the tests of the paper's claims
``sample_page``        a page of results that shows everything, and one made of accidents
``html_tree``          HTML as a tree, read without a browser; contrast of colours
``architecture_page``  writes the table of imports in `docs/architecture.md`
``installed``          installs wheel and source distribution into empty environments: `make wheel-test`
``tutorials``          runs the pages of `docs/tutorials`, and writes their outputs and pictures
``thinned``            says of which families `make test` runs only some cases
``no_torchvision``     hides a torchvision that does not import from packages that look for it
``guards``             measures which tests guard which module, for the table in `CONTRIBUTING.md`
=====================  ==============================================================================================
"""
