//! Order between the components of an instance.

use rbg_api::keys;
use rbg_api::v1alpha2::InstanceComponent;
use serde::Deserialize;

use crate::{RenderError, ports};

/// What a component waits for, by annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ComponentDependencies {
    /// Components that must be up before its pods are made.
    pub start_after: Vec<String>,
    /// Components whose surplus pods must be gone before its own go.
    pub delete_after: Vec<String>,
}

impl ComponentDependencies {
    /// What a component or its template says; nothing, if neither says anything.
    ///
    /// # Errors
    /// [`RenderError::Annotation`].
    pub fn from_component(component: &InstanceComponent) -> Result<Self, RenderError> {
        ports::annotation(component, keys::COMPONENT_DEPENDS_ON)
    }
}
