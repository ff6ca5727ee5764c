//! Saves and loads the state of a [`VarOptimizer`], by the variables' names.

use std::collections::BTreeMap;

use candle_core::{Error, Result, bail};

use super::VarOptimizer;
use crate::{Optimizer, ParamSpec, ReadState, StateDict, StateLayout, VisitState};

impl<O: Optimizer> VarOptimizer<O> {
    /// As [`Optimizer::state_dict`]: state by the variables' names.
    ///
    /// # Errors
    ///
    /// If the variables have no names; the errors of [`Optimizer::state_dict`].
    pub fn state_dict(&self) -> Result<StateDict> {
        self.check_named("state_dict")?;
        self.optimizer.state_dict().map_err(Error::wrap)
    }

    /// As [`Optimizer::load_state_dict`], by name only.
    ///
    /// # Errors
    ///
    /// If the variables or the state have no names; the errors of [`Optimizer::load_state_dict`].
    /// The optimizer is unchanged then.
    pub fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        self.check_named("load_state_dict")?;
        self.check_names_of("load_state_dict", &dict.params)?;
        self.optimizer.load_state_dict(dict).map_err(Error::wrap)
    }

    /// As [`Optimizer::state_layout`].
    ///
    /// # Errors
    ///
    /// As [`state_dict`](Self::state_dict).
    pub fn state_layout(&self) -> Result<StateLayout> {
        self.check_named("state_layout")?;
        self.optimizer.state_layout().map_err(Error::wrap)
    }

    /// As [`Optimizer::visit_state`].
    ///
    /// # Errors
    ///
    /// As [`Optimizer::visit_state`].
    pub fn visit_state(&self, visit: &mut VisitState<'_>) -> Result<()> {
        self.optimizer.visit_state(visit).map_err(Error::wrap)
    }

    /// As [`Optimizer::check_state`], by name only.
    ///
    /// # Errors
    ///
    /// As [`load_state_dict`](Self::load_state_dict).
    pub fn check_state(&mut self, saved: &StateLayout) -> Result<()> {
        self.check_named("check_state")?;
        self.check_names_of("check_state", &saved.params)?;
        self.optimizer.check_state(saved).map_err(Error::wrap)
    }

    /// As [`Optimizer::load_state`], by name only.
    ///
    /// # Errors
    ///
    /// As [`load_state_dict`](Self::load_state_dict), and [`Optimizer::load_state`].
    pub fn load_state(&mut self, saved: &StateLayout, read: &mut ReadState<'_>) -> Result<()> {
        self.check_named("load_state")?;
        self.check_names_of("load_state", &saved.params)?;
        self.optimizer.load_state(saved, read).map_err(Error::wrap)
    }

    fn check_names_of(&self, call: &str, saved: &BTreeMap<usize, ParamSpec>) -> Result<()> {
        if saved.is_empty() && !self.vars.is_empty() {
            bail!(
                "{call}: the state has no names, so its order of variables is not known: save it with \
                 `VarOptimizer::state_dict`, or write names and shapes into `StateDict::params`"
            );
        }
        Ok(())
    }

    fn check_named(&self, call: &str) -> Result<()> {
        if self.names.is_empty() && !self.vars.is_empty() {
            bail!(
                "{call}: the variables have no names, and the order of `VarMap::all_vars` differs between processes: \
                 make the optimizer with `VarOptimizer::from_var_map` or `VarOptimizer::with_names`"
            );
        }
        Ok(())
    }
}
