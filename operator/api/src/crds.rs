//! CustomResourceDefinitions of all kinds.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube_core::CustomResourceExt as _;

use crate::{v1alpha1, v1alpha2};

/// All CRDs, sorted by name. Groups and sets are converted between versions by a webhook; the installer adds
/// `spec.conversion` with its address and certificate.
#[must_use]
pub fn all() -> Vec<CustomResourceDefinition> {
    let mut crds = vec![
        merge_versions(
            v1alpha1::ClusterEngineRuntimeProfile::crd(),
            v1alpha2::ClusterEngineRuntimeProfile::crd(),
        ),
        v1alpha2::CoordinatedPolicy::crd(),
        v1alpha1::Instance::crd(),
        v1alpha1::InstanceSet::crd(),
        merge_versions(v1alpha1::RoleBasedGroup::crd(), v1alpha2::RoleBasedGroup::crd()),
        merge_versions(
            v1alpha1::RoleBasedGroupScalingAdapter::crd(),
            v1alpha2::RoleBasedGroupScalingAdapter::crd(),
        ),
        merge_versions(v1alpha1::RoleBasedGroupSet::crd(), v1alpha2::RoleBasedGroupSet::crd()),
        v1alpha2::RoleBasedGroupWarmup::crd(),
        v1alpha2::RoleInstance::crd(),
        v1alpha2::RoleInstanceSet::crd(),
    ];
    crds.iter_mut().for_each(normalise_schemas);
    crds
}

/// Merges two definitions into one with the versions of both.
fn merge_versions(
    older: CustomResourceDefinition,
    mut newer: CustomResourceDefinition,
) -> CustomResourceDefinition {
    newer.spec.versions.splice(0..0, older.spec.versions);
    newer
}

fn normalise_schemas(crd: &mut CustomResourceDefinition) {
    let names = &mut crd.spec.names;
    names.list_kind = Some(format!("{}List", names.kind));
    names.categories = None;
    for version in &mut crd.spec.versions {
        if let Some(schema) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            schema.title = None;
            schema.description = None;
            schema.required = None;
            not_nullable(schema);
        }
    }
}

/// An explicit null means "unset": without this, the API server would keep it instead of the default.
fn not_nullable(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    if let Some(values) = &mut schema.enum_ {
        values.retain(|value| !value.0.is_null());
    }
    schema.properties.iter_mut().flatten().for_each(|(_, property)| not_nullable(property));
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => not_nullable(items),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(not_nullable),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        not_nullable(values);
    }
}
