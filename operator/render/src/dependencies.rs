//! Dependencies between the components of an instance.

use rbg_api::keys;
use rbg_api::v1alpha2::InstanceComponent;
use serde::Deserialize;

use crate::{RenderError, ports};

/// Dependencies of a component, from its annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ComponentDependencies {
    /// Components that must be up before this component's pods are created.
    pub start_after: Vec<String>,
    /// Components whose surplus pods must be gone before this component's are deleted.
    pub delete_after: Vec<String>,
}

impl ComponentDependencies {
    /// Dependencies from the annotation of a component or its template; empty without the annotation.
    ///
    /// # Errors
    /// [`RenderError::Annotation`].
    pub fn from_component(component: &InstanceComponent) -> Result<Self, RenderError> {
        ports::annotation(component, keys::COMPONENT_DEPENDS_ON)
    }
}
