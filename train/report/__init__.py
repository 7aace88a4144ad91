"""Pages and plots of a validation (`page`), of a run (`run_page`), of several runs (`compare`)."""
